"""The doctor's checks: each looks at one thing and says how to mend it."""
