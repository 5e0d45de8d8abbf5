"""Write the report of a run as one HTML file."""
