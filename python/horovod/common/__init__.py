# SPDX-License-Identifier: Apache-2.0
"""What is the same in every framework; horovod.torch, horovod.tensorflow, ... stand on it."""
