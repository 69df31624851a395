"""CNI: serves the requests of container runtimes, identifies workloads, and attaches them."""
