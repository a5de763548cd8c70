"""The model as standard ONNX operators: what a layer means, in words that are not ours.

KDA is ``LinearAttention`` (gated delta rule) behind ``CausalConvWithState``, MXFP4 experts are
``DequantizeLinear`` of FLOAT4E2M1 with FLOAT8E8M0 scales, all else is plain opset 27. State goes in and comes
out as graph inputs and outputs. What ONNX cannot say is not there: no rows of different lengths (``[B, T]``
is a rectangle), no state updated in place, no collectives, hence none of the fusions around them; experts are
all computed and masked, which is right and slow.
"""

from .layer import layer_to_onnx, model_to_onnx

__all__ = ["layer_to_onnx", "model_to_onnx"]
