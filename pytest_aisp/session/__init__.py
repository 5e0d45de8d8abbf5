"""pytest's side: options, cases, the judge, what is recorded and reported."""
