# %% [markdown]
# # 00 Collectives: four gradients, one sum
#
# Four processes each hold a gradient, and each of them needs the sum of all four. Every step of this course, from
# DDP to ZeRO-3, decides who holds which piece of that sum, and when. Two moves do all of it: **reduce-scatter** (the
# sum exists once, in pieces) and **all-gather** (everybody gets all pieces). Here you build both out of `send` and
# `recv`, count what they send, and break them in the ways in which they break in training runs.
#
# Each section asks for a number. Say yours, then run the cell.

# %%
import torch
import torch.distributed as dist

import minizero as mz
from minizero.lens import plots

# %% [markdown]
# ## 1. Four processes add 1 to `count`. What is it afterwards?
#
# The next cell starts four processes, which stay warm until the end of this notebook. With four GPUs in the machine
# each would take one, and NCCL, NVIDIA's library, would carry their messages. On a laptop they run on the CPU, and
# gloo, which comes with PyTorch, carries them. The calls are the same. What is printed here is a laptop's.

# %% tags=["nbval-ignore-output"]
ranks = mz.Ranks(4)

# %% [markdown]
# `ranks.run(fn)` calls `fn(rank)` in each of the four, with `rank` = 0, 1, 2, 3. All four add 1 to `count`. What does
# the last line print: 4, 1 or 0? Most people say 4.

# %%
count = 0


def add_one(rank):
    global count
    count += 1
    print("one of", dist.get_world_size(), "processes, and count is", count)


ranks.run(add_one)
print("count in the notebook")
print(count)

# %% [markdown]
# There are five processes here, each with a `count` of its own, and the notebook's was never touched. A **rank** is one
# process of the group and also its number in it; `world_size` is how many there are. They run the same code and share
# no memory, so what one rank knows and another needs has to travel as a message. What a rank prints comes out here
# behind `[rank r]`.
#
# ## 2. Rank 0 hands its 12 weights to the other three. How many numbers does it send?
#
# The plainest message has two ends: one rank calls `send`, the other calls `recv` with a tensor of the same shape and
# dtype, which is filled. `mz.record_traffic()` notes each call as a rank makes it. 12, or 36?


# %%
def elements_sent(t):
    return sum(op.numel for op in t.ops if op.op == "send")


def hand_out(rank):
    weights = torch.full((12,), 7.0 if rank == 0 else 0.0, device=mz.device())
    with mz.record_traffic() as t:
        if rank == 0:
            for other in (1, 2, 3):
                dist.send(weights, dst=other)
        else:
            dist.recv(weights, src=0)
    return elements_sent(t)


print("elements sent by rank 0")
print(ranks.run(hand_out)[0])

# %% [markdown]
# With 1,024 ranks it would be 12,276, all of them out of one socket. `send` and `recv` are **point to point**: each
# names its partner, and the two ranks run different lines. The other kind of call has no partner:


# %%
def hand_out(rank):
    weights = torch.full((12,), 7.0 if rank == 0 else 0.0, device=mz.device())
    with mz.record_traffic() as t:
        dist.broadcast(weights, src=0)
    return f"last weight {weights[11]:.0f}, bytes booked {t.bytes_sent}"


for rank, row in enumerate(ranks.run(hand_out)):
    print(f"rank {rank}   {row}")

# %% [markdown]
# `broadcast` is a **collective**: all ranks of the group make the same call, sender and receivers alike, and the library
# finds the way. Booked are 48 bytes, 12 elements of 4 bytes, at the source: what rank 0 cannot do without. Who passes
# the weights on to whom is the library's affair. Look at what is missing in that cell: an `if rank == 0`. Section 8
# shows what happens when it creeps back in.
#
# ## 3. Two ranks swap a number. What does rank 0 hold in the end?
#
# Rank r brings the number 10ʳ, so rank 0 has 1 and rank 1 has 10. Each wants the other's, so each first listens and
# then speaks. `mz.launch(fn, 2)` starts two fresh processes for this one call.


# %% tags=["raises-exception", "nbval-ignore-output"]
def swap(rank):
    partner = rank ^ 1  # 0 and 1, 2 and 3
    mine = torch.full((1,), 10.0**rank, device=mz.device())
    theirs = torch.empty_like(mine)
    dist.recv(theirs, src=partner)
    dist.send(mine, dst=partner)
    return int(theirs)


mz.launch(swap, 2)

# %% [markdown]
# Nothing: there is no end. This is a **deadlock**, and since you will meet its text again, here is how it reads.
#
# - *The line that begins with `RanksTimeout`, the proof.* Rank 0 sits in `recv from rank 1`, rank 1 in
#   `recv from rank 0`; each waits for a `send` that stands one line below the other's `recv`. `#1` says that it is
#   rank 0's first receive from rank 1, `(float32 [1])` what should have arrived: dtype and shape.
# - *Then one row for each rank*: waiting, computing, finished or dead, in which call, at which line of which cell.
#
# No timeout had to pass for it. On the CPU each of our ranks writes down every call before it makes it, and once
# nobody moves the notes prove that nobody ever will. Plain `torch.distributed` prints nothing and waits: by default
# ten minutes with NCCL, thirty with gloo.
#
# Speaking first is no cure, because `send` waits for its receiver as well (turn the two lines round and run the cell
# again). The cure is to start both and wait afterwards:


# %%
def swap(rank):
    partner = rank ^ 1
    mine = torch.full((1,), 10.0**rank, device=mz.device())
    theirs = torch.empty_like(mine)
    calls = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return int(theirs)


print("rank 0 holds after the swap")
print(ranks.run(swap)[0])

# %% [markdown]
# `isend` and `irecv` are **asynchronous**: they return at once, with a *work* that stands for the unfinished call. The
# batch starts both before anyone waits. (gloo would also take the two calls one by one; NCCL would run them one after
# the other, and the deadlock would be back.) From its start until its `wait` a tensor belongs to the network. One that
# is being sent may not be written; one that is being received may not even be read. Section 9 catches a rank that does.
#
# From here on all our messages go through one function, which is that swap for any number of partners:


# %%
def exchange(sends, receives):
    """Both are dicts: the other rank -> the tensor to send, or to fill."""
    calls = [dist.P2POp(dist.isend, tensor, other) for other, tensor in sends.items()]
    calls += [dist.P2POp(dist.irecv, tensor, other) for other, tensor in receives.items()]
    for work in dist.batch_isend_irecv(calls):
        work.wait()


# %% [markdown]
# ## 4. Everybody needs the sum. How many elements does the busiest rank send?
#
# Now the gradients. Rank r's has 12 elements, all equal to 10ʳ, so the digits of a sum say whose gradients are in it:
# 1111 is complete, 1011 lacks rank 2's.
#
# There are two ways that everyone thinks of first. *Through rank 0*: the others send it their gradients, it adds, and
# sends back the sum. *Everyone to everyone*: each sends its gradient to all others, and adds what it gets. In which of
# the two does the busiest rank send more?


# %%
def gradient(rank):
    """Ones on rank 0, tens on rank 1, hundreds on rank 2, thousands on rank 3."""
    return torch.full((12,), 10.0**rank, device=mz.device())


def through_rank_0(x, rank, n):
    """x [P] becomes the sum over the n ranks."""
    if rank > 0:
        dist.send(x, dst=0)
        dist.recv(x, src=0)
        return
    theirs = {other: torch.empty_like(x) for other in range(1, n)}
    exchange({}, theirs)
    x += sum(theirs.values())
    exchange(dict.fromkeys(theirs, x), {})


def everyone_to_everyone(x, rank, n):
    """x [P] becomes the sum over the n ranks."""
    theirs = {other: torch.empty_like(x) for other in range(n) if other != rank}
    exchange(dict.fromkeys(theirs, x), theirs)
    x += sum(theirs.values())


# %%
def add_up(rank, way):
    """The first element of the sum, and how many elements this rank sent for it."""
    x = gradient(rank)
    with mz.record_traffic() as t:
        way(x, rank, dist.get_world_size())
    return int(x[0]), elements_sent(t)


sent = {}
for way in (through_rank_0, everyone_to_everyone):
    sums, sent[way.__name__] = zip(*ranks.run(add_up, way), strict=True)
    print(f"{way.__name__:20}   sums {sums}   sent {sent[way.__name__]}")

print("elements sent by the busiest rank, either way")
print(*{max(by_rank) for by_rank in sent.values()})

# %% [markdown]
# Three times the gradient. Through rank 0 only one rank pays that and the others wait for it; everyone to everyone all
# pay it. With P elements and N ranks it is P(N−1) on the busiest rank: twice the ranks, more than twice the time.
#
# ## 5. What if nobody holds the whole sum? How many elements does each rank send then?
#
# Rank 0's trouble is that it is responsible for all 12 sums. Let us cut the gradient into four **chunks** of 3, and make
# rank r responsible for chunk r alone. The ranks sit in a ring, and each only ever sends to its right neighbour:

# %% tags=["nbval-ignore-output"]
plots.ring(4, step=0)

# %% [markdown]
# Follow chunk 3. Rank 0 sends its own copy to rank 1, which adds its own and sends the sum of two to rank 2, which adds
# its own and sends the sum of three to rank 3, which adds its own: complete, where it belongs. The other chunks make
# the same trip at the same time, each one seat further on, so no wire is ever idle. In step s rank r sends chunk
# (r − s − 1) mod N, and what it receives, and adds to, is the chunk it sends next. After three steps chunk r is complete
# on rank r. 36 elements were too many. How many are these?


# %%
def ring_reduce_scatter(x, rank, n):
    """x [P] is cut into n chunks; its chunk number `rank` becomes the sum over the ranks."""
    chunks = x.chunk(n)
    right, left = (rank + 1) % n, (rank - 1) % n
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        exchange({right: chunks[(rank - step - 1) % n]}, {left: arriving})
        chunks[(rank - step - 2) % n].add_(arriving)


def first_of_each_chunk(rank):
    x = gradient(rank)
    with mz.record_traffic() as t:
        ring_reduce_scatter(x, rank, dist.get_world_size())
    return [chunk[0].item() for chunk in x.chunk(4)], elements_sent(t)


rows, sent_by = zip(*ranks.run(first_of_each_chunk), strict=True)
print("chunk       0     1     2     3")
for rank, row in enumerate(rows):
    print(f"rank {rank}", *(f"{value:5.0f}" for value in row))

print("elements sent by each rank")
print(*set(sent_by))

# %% [markdown]
# Three chunks of three. The diagonal reads 1111: each rank is done with its own chunk. Everything else is leftovers, sums
# that were under way when they passed through: rank 0's chunk 1 holds 1101, the contributions of ranks 2, 3 and 0, and
# rank 1 finished it one step later. Nobody may use those. This is a **reduce-scatter**: the sum exists, once, spread
# over the ranks in pieces.
#
# ## 6. The whole sum for everyone. How many elements do the four send together?
#
# A second trip round the same ring, now without adding: each rank passes on the finished chunk that it has, and keeps a
# copy of the one that arrives. That is an **all-gather**, and one after the other the two make an **all-reduce**.


# %%
def ring_all_gather(x, rank, n):
    """Chunk number `rank` of x [P] is finished; the others are fetched from who finished them."""
    chunks = x.chunk(n)
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1):
        exchange({right: chunks[(rank - step) % n]}, {left: chunks[(rank - step - 1) % n]})


def ring_all_reduce(x, rank, n):
    """x [P] becomes the sum over the n ranks."""
    ring_reduce_scatter(x, rank, n)
    ring_all_gather(x, rank, n)


def same_as_torch(rank):
    ours, theirs = gradient(rank), gradient(rank)
    ring_all_reduce(ours, rank, dist.get_world_size())
    dist.all_reduce(theirs)
    return torch.equal(ours, theirs)


print("same as dist.all_reduce on each rank:", ranks.run(same_as_torch))

# %% [markdown]
# Through rank 0 the four ranks sent 36 + 12 + 12 + 12 = 72 elements together. How many does the ring need? Most people
# say about half.

# %%
_, sent["ring_all_reduce"] = zip(*ranks.run(add_up, ring_all_reduce), strict=True)

print(f"{'elements sent':20}  busiest rank   all together")
for name, by_rank in sent.items():
    print(f"{name:20}  {max(by_rank):12}   {sum(by_rank):12}")

print("elements sent in the ring, all together")
print(sum(sent["ring_all_reduce"]))

# %% [markdown]
# The ring saves not a single element; it takes the work from rank 0 and hands it out evenly, 18 to each. And 18 is
# 9 + 9: on each of the two trips a rank sends all chunks but one. On the first, which gets the sums done, that is its own
# chunk; on the second, which hands them out, its right neighbour's. Patarasuk and Yuan (2009) proved that no
# all-reduce can do with less on its busiest rank, and call it bandwidth-optimal.
#
# `dist.all_reduce` is this in one call, and `record_traffic` books for it what the ring would send: 18 elements of
# 4 bytes on each rank. (That this makes 72 again is chance. Above, 72 were the elements of all four ranks.)


# %%
def bytes_of_one_call(rank):
    with mz.record_traffic() as t:
        dist.all_reduce(gradient(rank))
    return t.bytes_sent


print("bytes sent by rank 0 for dist.all_reduce")
print(ranks.run(bytes_of_one_call)[0])

# %% [markdown]
# ## 7. From 4 ranks to 1,024: how many times as much does each rank send?
#
# The gradient keeps its size, P = 12 elements, and the ring grows from 2 ranks to 3 and 4. Continue the row in your head
# up to 1,024. Does a rank send 256 times as much as in the ring of 4, 10 times, twice, or a third more?

# %%
counted = {n: mz.launch(add_up, n, ring_all_reduce)[0][1] for n in (2, 3)}
counted[4] = sent["ring_all_reduce"][0]
for n, elements in counted.items():
    print(f"{n} ranks: a rank sends {elements} elements")

# %% tags=["nbval-ignore-output"]
n_ranks = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024]
by_theory = {"2P(N−1)/N": [mz.theory.sent("all_reduce", 12, n) for n in n_ranks]}
title = "Ring all-reduce of P = 12 elements"
picture = plots.curve(n_ranks, by_theory, "ranks", "elements a rank sends", title, log_x=True)
axes, orange = picture.axes[0], plots.COLOURS["comm"]
axes.plot(counted.keys(), counted.values(), "o", color=orange, clip_on=False)
beside = {"xytext": (8, -8), "textcoords": "offset points", "fontsize": plots.SIZE}
axes.annotate("counted", (4, counted[4]), color=orange, **beside)
axes.set_xticks([2, 4, 16, 64, 256, 1024], ["2", "4", "16", "64", "256", "1,024"])
axes.minorticks_off()
picture

# %%
print("1,024 ranks to 4, elements that a rank sends")
print(f"{mz.theory.sent('all_reduce', 12, 1024) / counted[4]:.2f}")

# %% [markdown]
# A third more, and no larger ring gets to 24 elements. More ranks mean more steps, 2(N−1) of them, but smaller chunks,
# P/N elements, and the product hardly moves: **2P(N−1)/N** elements, P the number of elements in the tensor and N the
# number of ranks. The busiest rank of section 4 would need a page 512 times as high.
#
# Look at the left end, too. With N = 2 the ring sends 12, exactly what the two naive ways send: on two ranks a bad
# algorithm and a good one cost the same, and a wrong one often gives the right numbers. That is why the exercises check
# you on three.
#
# ## 8. Rank 3 sums two gradients in the other order. What does rank 0 hold?
#
# Two ways in which real runs break, the kind one first. Only rank 0 writes to the log, so in this script only rank 0
# computes the mean loss that goes there:


# %% tags=["raises-exception", "nbval-ignore-output"]
def log_mean_loss(rank):
    loss = torch.full((1,), rank + 1.0, device=mz.device())
    if rank == 0:
        dist.all_reduce(loss)
        print("mean loss", loss.item() / dist.get_world_size())


ranks.run(log_mean_loss)

# %% [markdown]
# It prints no loss. Rank 0 waits in its first all-reduce; the others have finished `after 0 calls`. That count is what to
# look at first: **the rank whose count is behind is the one that skipped a call**, and the line shown for the waiting
# rank tells which. The cure is to let all ranks call and one rank print. The same hang comes from a rank that has one
# batch less than the others, from a `continue` after a NaN on one rank, from an exception that one rank swallows.
#
# Now the other one. Each rank sums two gradients of one shape, the second twice the first, so that the sums are 1111 and
# 2222. Rank 3 has its gradients ready in the other order and starts with the second. What does rank 0 hold in the place
# of 1111?


# %%
def two_sums(rank):
    first, second = gradient(rank), 2 * gradient(rank)
    for each in (first, second) if rank < 3 else (second, first):
        dist.all_reduce(each)
    return int(first[0]), int(second[0])


both = ranks.run(two_sums)
for rank, (first, second) in enumerate(both):
    print(f"rank {rank} holds {first} and {second}")

print("rank 0's first sum")
print(both[0][0])

# %% [markdown]
# It neither hangs nor raises, and every number is wrong: 2111 is the first gradient of ranks 0, 1, 2 plus the *second* of
# rank 3. A collective carries no name. The k-th call on one rank meets the k-th call on the others, whatever they meant
# by it. So one rule holds for every step of this course: **all ranks issue the same collectives in the same order**.
# Give the second gradient another shape, `2 * gradient(rank)[:6]`, run the cell again, and `mz.Ranks` says where the
# orders part. With equal shapes nobody can.
#
# ## 9. An all-reduce has started. What is in the tensor?
#
# Rank 0 starts an all-reduce with `async_op=True` and looks into the tensor before it waits. The other ranks hold back
# until rank 0 has looked. Does it see 1, 1111, or something between?


# %%
def look_early(rank):
    x, go = gradient(rank), torch.zeros(1, device=mz.device())
    if rank > 0:
        dist.recv(go, src=0)
    work = dist.all_reduce(x, async_op=True)
    early = int(x[0])
    if rank == 0:
        exchange({1: go, 2: go, 3: go}, {})
    work.wait()
    return early, int(x[0])


early, late = ranks.run(look_early)[0]
print("in rank 0's tensor after the wait:", late)
print("before it")
print(early)

# %% [markdown]
# Its own 1: the call returned, and nothing had happened yet. Without the trick of holding the others back it would
# sometimes see 1, sometimes half a sum, and on a fast network nearly always 1111, until the day when a rank is late.
# Nothing raises. An optimizer step taken at that moment trains each rank on its own gradient, and the ranks drift apart.
#
# So an asynchronous collective is a loan: the tensor goes to the network at the call and comes back at `wait`, and
# **between the two the rank is free to compute anything else**. A backward pass has plenty of anything else.

# %%
ranks.close()

# %% [markdown]
# ## Interview corner
#
# ### "What does an all-reduce send, and why does it hardly grow with the number of GPUs?"
#
# **What they want to find out.** Whether you know the two halves, or only the name of the call. Whoever knows the halves
# can derive what DDP, ZeRO and FSDP send.
#
# **The full answer.** An all-reduce leaves the sum of all ranks' tensors on every rank. It is a reduce-scatter, after
# which rank r holds the finished sum of chunk r, followed by an all-gather of the finished chunks. In a ring each half
# takes N−1 steps, and in each step a rank sends one chunk of P/N elements to its neighbour. That makes P(N−1)/N for
# each half and 2P(N−1)/N together. With N the chunks shrink as fast as the steps increase, so the amount tends to 2P:
# 1.5P on 4 ranks, 1.998P on 1,024. In total the ring sends as much as collecting everything on rank 0 and sending the sum
# back would; it spreads it evenly, and all wires work all the time. What does grow with N is the number of steps, and
# each costs a *latency*, the time that a message takes however small it is. That is why libraries use trees for small
# tensors.
#
# **In 30 seconds.** Reduce-scatter plus all-gather. In each of the two a rank sends all chunks but one, (N−1)/N of the
# tensor, so an all-reduce sends just under twice the tensor however many ranks there are. The bytes are flat in N, the
# latency is not.
#
# **Follow-ups**
# - *ZeRO-2 only reduce-scatters its gradients. How much more does DDP send, which all-reduces them?* Nothing. ZeRO-2
#   all-gathers the updated weights: the same two halves with the optimizer step in between, 2P(N−1)/N.
# - *25 MB of gradients on 1,024 ranks at 25 GB/s, with 10 µs for each step of the ring: what dominates?* The bytes take
#   2 · 25 MB / 25 GB/s = 2 ms, the 2,046 steps take 20 ms. Latency, by ten to one: larger messages, or a tree with about
#   log₂ N levels.
# - *Which rank owns which chunk after the reduce-scatter?* Whatever the ring's starting offset says; it has to be fixed,
#   because the all-gather relies on it. Here rank r owns chunk r.
#
# **Wrong answers people give**
# - *"N times the gradient, everybody has to see everybody's."* That is everyone to everyone, 36 in section 4. A rank
#   needs the sum, not the summands.
# - *"P/N, each rank only handles its share."* Per step, yes; there are 2(N−1) steps.
# - *"The ring is faster because it sends less in total."* 72 and 72 in section 6.
#
# **Your own project.** Say what your last multi-GPU job all-reduced in a step: parameters × bytes × 2(N−1)/N. Without a
# GPU: the ring in this notebook is yours, a dozen lines, and you have counted it on 2, 3 and 4 processes.
#
# ### "1.5 B parameters, fp16 gradients, 8 GPUs, each can send 25 GB/s. How long does the all-reduce take at least?"

# %%
bandwidth = 25e9  # bytes that one rank sends in a second
gradient_bytes = 2 * 1.5e9  # fp16: 2 bytes each
for n in (8, 64):
    sent_bytes = mz.theory.sent("all_reduce", gradient_bytes, n)
    ms = sent_bytes / bandwidth * 1e3
    print(f"{n:2} ranks: {sent_bytes / 1e9:.2f} GB sent by each, at least {ms:.0f} ms")

# %% [markdown]
# **What they want to find out.** Whether you can turn an algorithm into a time, with units, and whether you say what the
# number leaves out.
#
# **The full answer.** The gradients are 1.5 B × 2 bytes = 3 GB. A ring all-reduce sends 2 · 7/8 of that, 5.25 GB a rank,
# and receives as much at the same time in the other direction. At 25 GB/s that is 210 ms. It is a lower bound: no
# latency (14 steps of some 10 µs, 0.14 ms, negligible here), full bandwidth from the first byte to the last, and
# nothing else on the wire. Whether the step gets 210 ms longer is another question: what is sent while backward still
# runs costs no time of its own.
#
# **In 30 seconds.** 3 GB of gradients, times 2 · 7/8, is 5.25 GB; at 25 GB/s, 210 ms, before latency, if nothing is
# computed meanwhile.
#
# **Follow-ups**
# - *And on 64 GPUs?* 2 · 63/64 instead of 2 · 7/8: 5.91 GB, 236 ms. Eight times the GPUs, an eighth more time.
# - *Backward takes 300 ms. How much of the 210 do you see?* All of it, if the gradients leave when backward is over. If
#   each leaves as soon as it exists (lesson 01), at best only what the last few take, which exist when backward ends.
# - *The gradients are in fp32?* Twice the bytes, 420 ms.
#
# **Wrong answers people give**
# - *"3 GB / 25 GB/s = 120 ms."* Counts one of the two trips, and not the 7/8.
# - *"7 × 3 GB / 25 GB/s = 840 ms."* The busiest rank of section 4, not a ring.
# - *"105 ms, the data sheet says 50 GB/s."* Data sheets like to add both directions. The ring sends 5.25 GB one way while
#   it receives 5.25 GB the other way, so the figure for one direction counts.
#
# **Your own project.** Take your model's gradient bytes and your link, say the bound, then the time you measured. Divide
# the bytes that a rank sends, 2(N−1)/N times the tensor, by that time: `all_reduce_perf` of nccl-tests prints this as
# *bus bandwidth*, and it can be compared with what the link promises. Without a GPU: time `dist.all_reduce` of 100 MB on
# two local ranks.
#
# ### "What can deadlock in distributed training, and how do you find it?"
#
# **What they want to find out.** Whether you look for the cause in an order that ends.
#
# **The full answer.** A call waits for its partners, so it hangs when a partner never comes. Three families. *One rank
# skips a collective*: an `if rank == 0` around it, one batch less in its loader, an early `continue`, an exception that
# was swallowed. *The ranks issue different collectives or another order*: a parameter that one rank does not use,
# gradients that arrive in another order, iteration over a `set`. With different shapes that hangs or crashes; with
# equal shapes it runs on with wrong numbers. *Point to point in a circle*: everybody receives first, or everybody sends
# first. To find it: see where each rank stands (`py-spy dump`, or the flight recorder of PyTorch,
# `TORCH_FR_BUFFER_SIZE`), compare the number and the signature of the last collective of each rank, and go to the rank
# that is behind. It has either died, or is still computing, or took another branch. `TORCH_DISTRIBUTED_DEBUG=DETAIL`
# compares kind and shape of every call over the ranks before it runs; against swapped calls of one shape nothing helps
# but a fixed order.
#
# **In 30 seconds.** Ranks must issue the same collectives in the same order. A hang means that one skipped or swapped a
# call. Dump all ranks, count their collectives, look at the one whose count is behind.
#
# **Follow-ups**
# - *Rank 3 has 99 batches, the others 100. With 4 all-reduces a step, which call hangs?* Number 397, the first of step
#   100: rank 3 has made 99 · 4 = 396.
# - *The job hangs with 2 of 8 ranks at 0 % GPU and 6 at 100 %. Where do you look?* At the two. An NCCL kernel that waits
#   spins at 100 %; the idle ones never got to the collective.
# - *How do you prevent it?* No collective under a condition that depends on the rank or on local data; agree first (a
#   small all-reduce of "do I have a batch?"), then act. Send gradients in a fixed order, not in the order of arrival.
#
# **Wrong answers people give**
# - *"The network is slow, raise the timeout."* A slow network is late on all ranks. In section 8 the others had finished,
#   and no timeout is long enough for that.
# - *"If nothing hangs, the order was right."* Section 8: 2111 and 1222, without a word.
# - *"Put a barrier in front of it."* A barrier is a collective too; the rank that skips the one skips the other, or the
#   barrier hangs in its place. At best it moves the hang to a line that tells you more.
#
# **Your own project.** Tell one hang: what you saw, what each rank was doing, which line it was. Without a cluster: make
# the one of section 8 in a script of ten lines, and say how you would have found it without `mz.Ranks`.
#
# ---
# The one thing a training step can do while an all-reduce is under way is its own backward pass, so in lesson 01 we send
# each gradient as soon as it exists, and build DDP.
#
# ## Now you
#
# `minizero start 00`, in a terminal, puts the exercises into `work/00_collectives.ipynb`: the ring in the other direction,
# from one step of it to an all-reduce of any shape. One number and one bug come on top.
