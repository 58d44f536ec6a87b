"""What all tests share."""

import torch

torch.set_num_threads(1)  # tiny tensors gain nothing from threads, and waiting for them costs much
