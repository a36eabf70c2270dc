"""torch's own backends in the trainer's process, made such that they can be configured again."""
