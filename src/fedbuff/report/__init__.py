"""What a run remembers: its folder, tables and plots."""
