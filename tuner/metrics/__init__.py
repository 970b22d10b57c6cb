"""What is measured: latencies and throughput, the server's own counters, memory."""
