"""Wrong answers to offload.number: 70 B parameters on 8 ranks, the optimizer offloaded, 4 micro-batches."""

from wrong_answers import wrong

wrong("each copies its own shard", 10 * 70, mistake="forgets to divide by N")
wrong("gradients are 2 bytes, not 4", (4 * 4 + 2) * 70 / 8, mistake="sends gradients in fp32")
wrong("only the gradients", 2 * 4 * 70 / 8, mistake="forgets the weights")
wrong("only the weights", 2 * 70 / 8, mistake="forgets the gradients")
wrong("the moments never cross", (10 + 24) * 70 / 8, mistake="sends master and moments both ways")
wrong("they do not cross", 12 * 70 / 8, mistake="counts what lies on the host")
wrong("nothing has to be fetched", 6 * 4 * 70 / 8, mistake="fetches weights for each forward and backward")
wrong("is added up on the host", 4 * 70 / 8, mistake="counts one micro-batch")
wrong("once a step, not for each micro-batch", 16 * 70 / 8, mistake="sends weights for each micro-batch")
wrong("the answer is a number", "87.5 GB", mistake="a text")
