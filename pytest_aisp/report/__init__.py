"""Write a run as one HTML file that people read in a browser."""
