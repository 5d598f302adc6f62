"""Records that other tools wrote: PyTorch's Flight Recorder, NCCL's RAS."""
