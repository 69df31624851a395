"""The lab: a cluster in network namespaces of one machine, for the demo, the tests and the study of bugs."""
