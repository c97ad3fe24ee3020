"""The QNN execution provider: what is installed, its options, its sessions, its binaries."""
