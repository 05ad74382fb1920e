"""Files on disks and in object stores: opening them, suggestions for wrong names, and files that are skipped."""
