"""The lab: Weft at work on one machine. The demo, the test bed and the way to study a bug."""
