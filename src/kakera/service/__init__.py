"""What lets a server run for weeks: one instance a device, a watchdog fed by progress, a systemd unit."""
