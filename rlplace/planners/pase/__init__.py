"""PaSE: how every layer is split over the devices, by dynamic programming over an elimination order."""
