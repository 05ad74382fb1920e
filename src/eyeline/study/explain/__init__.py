"""`eyeline explain`: causes of lost time, in what runs and profiles have written."""
