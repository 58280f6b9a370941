"""Tiny random transformers models with a token per letter."""


def save_letter_model(home, kind, pad=0, template=True, **special):
    """Saves a ``kind`` of transformers that reads 12 tokens, with ``template`` [CLS] a [SEP] b
    [SEP]; ``special`` are tokens that its tokenizer knows as such. Needs torch."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    frame = ("[PAD]", "[CLS]", "[SEP]")
    vocab = {token: i for i, token in enumerate([*frame, *"abcdefghijklmnopqrstuvwxyz"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=names if template else names[::2], **special
    ).save_pretrained(home)
    model = getattr(transformers, kind)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = model.config_class(
        **sizes, vocab_size=29, num_hidden_layers=1, max_position_embeddings=12, pad_token_id=pad
    )
    torch.manual_seed(3)
    model = model(config).eval()
    for weights in model.parameters():
        weights.data *= 5
    model.save_pretrained(home)
