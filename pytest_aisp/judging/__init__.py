"""Judge kernels that models write: turn a problem and a candidate into a page, and run it."""
