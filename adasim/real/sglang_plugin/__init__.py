"""AdaFlash on SGLang: the speculative algorithm ADAFLASH, found by SGLang through its plugin entry point.

``plugin`` registers; ``contract`` says which SGLang it fits; ``settings`` reads the policy; ``algorithm`` joins SGLang's
DFLASH family; ``worker`` runs a round, with ``decider`` (the PolicyDriver's side), ``draft_head`` and ``accept``;
``draft_model`` is the drafter with its length head; ``hooks`` lets the outside read (``rounds``, timed by ``marks``;
``facts``) and give ``orders``, which ``player`` carries out; ``reload`` replaces the drafter of a running engine; ``cpu``
makes it run without a GPU. Only those that must import SGLang.
"""
