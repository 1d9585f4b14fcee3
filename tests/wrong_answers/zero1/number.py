"""Wrong answers to zero1.number: 30 B parameters, 4 ranks, GB of model states on one rank."""

from wrong_answers import wrong

wrong("that is DDP", 480, mistake="shards nothing")
wrong("ZeRO-1 divides the optimizer's 12 only", 120, mistake="divides all 16 bytes by N")
wrong("that is ZeRO-2", 165, mistake="shards the gradients too")
wrong("the fp32 master is missing", 180.0, mistake="counts Adam's moments only")
wrong("fp32 training", 300, mistake="counts fp32 weights and gradients, and no master")
wrong("that is the optimizer's part", 90, mistake="forgets weights and gradients")
wrong("that is what it saves", 270.0, mistake="answers another question")
