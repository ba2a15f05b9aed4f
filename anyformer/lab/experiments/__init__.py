"""Claims, one file each."""
