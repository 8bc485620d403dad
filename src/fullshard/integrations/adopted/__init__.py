"""What `adopt` changes in client libraries when they are imported, one file a library."""
