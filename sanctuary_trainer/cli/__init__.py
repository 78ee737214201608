"""The command line `sanctuary`: one file per command. Nobody imports it."""
