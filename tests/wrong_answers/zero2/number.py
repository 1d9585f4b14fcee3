"""Wrong answers to zero2.number: 30 B parameters, 4 ranks, 6 micro-batches, GB sent by one rank in a step."""

from wrong_answers import wrong

wrong("ZeRO-2 reduces every micro-batch", 90, mistake="reduces once, as with no_sync()")
wrong("(N−1)/N is missing", 420, mistake="sends to itself")
wrong("that would be DDP's all-reduces", 540, mistake="gathers in each micro-batch")
wrong("the all-gather of the weights is missing", 270.0, mistake="forgets the weights")
wrong("that is ZeRO-3", 810, mistake="gathers the weights twice in each micro-batch")
wrong("that is what all ranks send together", 1260, mistake="adds up the ranks")
wrong("16 bits are 2 bytes", 630, mistake="counts 4 bytes an element")
