"""Logs of events, unsorted and larger than memory, as histories of users: read, filtered, grouped and sorted once."""
