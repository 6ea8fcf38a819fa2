"""`fedbuff bench`: how fast this machine trains, beside a per-client loop and centralised training."""
