"""The loops: functions that read like the loop you would have written."""
