"""The report's sections, a file each: what it says, its tables and its plot."""
