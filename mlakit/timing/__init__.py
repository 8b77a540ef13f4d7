"""One cell, timed: buffers, clocks, sampling, statistics, controls, the device's lock."""
