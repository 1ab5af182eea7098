"""A cluster of real sshd and dockerd hosts on one machine."""
