"""Learning: tasks, local training, evaluation. torch computes here (and in bench), imported when it is first needed.

Where things are:

    task, tasks, data        what is learned, and from whom
    cifar, celeba, sent140, glove, leaf, hugging_face, synthetic    datasets; folder, cache, rows and parts beneath them
    partition                who has which examples
    models, networks, losses
    client, local            what a client does, and the obvious loop that does it: the oracle of all that follows
    batched, twins           many clients at once, layer by layer
    small, words             perceptrons and the network for text: a whole chunk of trips by one call of a kernel; places
    shuffle, generator       randomness that belongs to a trip
    kernels                  C++ that is compiled at the first use
    trial, first_look        is what can be trained at once the same as the loop? is the task what it should be?
    work, evaluate, cost     what a worker does
    flat, training           a model's weights as one vector; [training]
"""
