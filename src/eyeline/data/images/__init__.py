"""An image to patches: opened, checked, decoded, resized and cut."""
