"""Wrong answers to ddp.number: 7 B parameters, 8 GPUs, 16 bits, 3 micro-batches, without no_sync()."""

from wrong_answers import wrong

wrong("an all-reduce has two halves", 36.75, mistake="counts the reduce-scatter only")
wrong("(N−1)/N is missing", 84, mistake="takes 2Ψ for a rank's share")
wrong("16 bits are 2 bytes, not 4", 147.0, mistake="counts fp32 gradients")
wrong("without no_sync() every micro-batch is reduced", 24.5, mistake="counts one reduction a step")
wrong("what all GPUs send together", 588.0, mistake="adds up all ranks")
wrong("the model states", 112, mistake="takes memory for traffic")
