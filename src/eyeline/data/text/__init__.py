"""Messages to token ids and labels."""
