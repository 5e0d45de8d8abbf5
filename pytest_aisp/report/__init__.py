"""A run as one HTML file to look at."""
