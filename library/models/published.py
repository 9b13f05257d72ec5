"""
The configs of the three published models, for --plan where neither the cache nor the hub has them.

The models are Qwen/Qwen-Image-Edit, -2509 and -2511 on huggingface.co, by the Qwen team, under the Apache License 2.0,
https://www.apache.org/licenses/LICENSE-2.0. What follows are those values of their config files that shapes, lengths
and noise levels depend on, as diffusers' defaults and other projects give them; the text encoder and its processor are
those of Qwen/Qwen2.5-VL-7B-Instruct. Of the tokenizer (11 MB) there is nothing here: tiny's stands in.
"""

CONFIGS = {
    "transformer/config.json": dict(
        _class_name="QwenImageTransformer2DModel", num_layers=60, num_attention_heads=24, attention_head_dim=128,
        in_channels=64, out_channels=16, joint_attention_dim=3584, axes_dims_rope=[16, 56, 56], patch_size=2,
        guidance_embeds=False),
    "scheduler/scheduler_config.json": dict(
        _class_name="FlowMatchEulerDiscreteScheduler", num_train_timesteps=1000, base_shift=0.5, max_shift=0.9,
        base_image_seq_len=256, max_image_seq_len=8192, shift=1.0, shift_terminal=0.02, use_dynamic_shifting=True,
        time_shift_type="exponential"),
    "vae/config.json": dict(
        _class_name="AutoencoderKLQwenImage", base_dim=96, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
        temperal_downsample=[False, True, True], z_dim=16),
    # Qwen2.5-VL-7B
    "text_encoder/config.json": dict(
        model_type="qwen2_5_vl", tie_word_embeddings=False,
        text_config=dict(
            model_type="qwen2_5_vl_text", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
            num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, max_position_embeddings=128000),
        vision_config=dict(
            model_type="qwen2_5_vl", depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16,
            out_hidden_size=3584, patch_size=14, spatial_merge_size=2, temporal_patch_size=2)),
    "processor/preprocessor_config.json": dict(
        image_processor_type="Qwen2VLImageProcessor", patch_size=14, temporal_patch_size=2, merge_size=2,
        min_pixels=56 * 56, max_pixels=28 * 28 * 16384)}
