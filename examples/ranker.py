import torch
from nestpipe import (
    Adam, Batch, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor,
    PipelineConfig, TrainPipeline,
)

class Ranker(torch.nn.Module):                # any nn.Module: nothing is traced or rewritten
    def __init__(self):
        super().__init__()
        item = EmbeddingBagConfig("item", embedding_dim=64, feature_names=["item", "history"])
        self.sparse = EmbeddingBagCollection([item])
        self.dense = torch.nn.Linear(128, 1)

    def forward(self, batch):                 # mean loss over this batch's samples, and any outputs
        logits = self.dense(self.sparse(batch.sparse_features).values()).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()

ids, lengths = torch.tensor([7, 8, 1, 2]), torch.tensor([1, 1, 2, 0])  # items 7, 8; history [1, 2], []
features = KeyedJaggedTensor(["item", "history"], ids, lengths=lengths)
batches = iter([Batch(features, labels=torch.tensor([1.0, 0.0]))] * 100)
torch.manual_seed(0)                          # the same dense weights on any number of workers
model = Ranker()
dense_optimizer, sparse_optimizer = torch.optim.Adam(model.parameters(), 1e-3), Adam(1e-3)
config = PipelineConfig(schedule="nested", micro_batches=4)
pipeline = TrainPipeline(model, dense_optimizer, sparse_optimizer, config)
while step := pipeline.progress(batches):     # the same iterator until it returns None
    print(step.batch, step.loss)
print(pipeline.rows("item", keys=[7, 8]))     # current rows of any keys
