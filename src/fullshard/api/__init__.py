"""The public interface: both front-ends, wrapping policies, and functions that serve both."""
