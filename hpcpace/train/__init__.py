"""The reference workloads: models that everybody knows, on any mesh of data, pipeline and tensor parallelism."""
