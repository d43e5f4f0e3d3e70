"""The application over engines that compute nothing, to measure the serving layer alone."""
