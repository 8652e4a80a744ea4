"""What ``taylor_calibrate_kd`` is made of besides its stages: which are to be run, their models, and what is said of them."""
