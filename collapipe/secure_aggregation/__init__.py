"""Sums of units' updates that show nobody a single one: pairwise masks with Shamir shares.

The protocol of Bonawitz et al. (2017), "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", with its consistency check. A round has five messages:

1. each unit makes two pairs of keys and sends the public ones (``UnitWithKeys``), signed if it has
   credentials;
2. it receives everybody's, and sends shares of its mask key and of its self mask's seed, sealed for
   each other unit, by way of the server (``UnitWithShares``);
3. it sends its quantised update plus its self mask, plus or minus a mask for each other unit
   (``MaskedUnit``);
4. it is sent the list of survivors, the units whose updates arrived, and confirms it to each of
   them by the keys of message 1 (``UnitWithSurvivors``);
5. it receives the survivors' confirmations. If enough of them confirm the same list, it reveals its
   share of the seed of each survivor and of the mask key of each other unit: never both of one.

``thresholds`` proves what a server that lies can learn. The proof needs units that know whose keys
the others' are (``privacy.peers``); without them a server can be all other units itself, and only a
server that follows the protocol learns no more than the sum.

A stage is an object that the next one takes the place of, so that nothing can be asked twice.
Nothing here knows of Flower.
"""
