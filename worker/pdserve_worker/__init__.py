"""What prefill and decode processes share in front of their engine."""
