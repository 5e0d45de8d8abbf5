"""The pytest side: options, cases, verdicts, recording and terminal output."""
