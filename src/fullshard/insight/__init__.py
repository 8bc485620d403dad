"""What a model costs: reads layouts, events and units from outside, and changes no running unit."""
