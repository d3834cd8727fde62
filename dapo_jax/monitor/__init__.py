"""Host: where a run's numbers go: log file, metrics, TensorBoard, samples, timers and console."""
