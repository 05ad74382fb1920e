"""What lies on disks and in object stores: opening it, names that are nearly right, and what is passed over."""
