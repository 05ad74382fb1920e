"""Records and small tools that every other folder agrees on. Imports nothing of Eyeline but itself."""
