-- train_mlp - two spirals that no straight line divides, and a small model that learns them apart.
local rille = require "rille"
local nn = rille.nn
local mlp = require "models.mlp"

local o = rille.options {
  help = "Trains a small model to tell two spirals apart.",
  { "steps", 500, "training steps" },
  { "width", 64, "of the two hidden layers" },
  { "lr", 1e-2, "learning rate" },
  { "seed", 0, "of weights and data order" },
}

-- n points along a spiral of one and a half turns; the second one is the first turned by half.
local function spirals(n)
  local points, labels = {}, {}
  for i = 0, n - 1 do
    local angle, label = 0.5 + 9 * (i // 2) / (n // 2), i % 2
    local radius = angle / 10
    points[i + 1] = { radius * math.cos(angle + math.pi * label),
      radius * math.sin(angle + math.pi * label) }
    labels[i + 1] = label
  end
  return rille.tensor(points), rille.tensor(labels)
end

local x, y = spirals(400)
local model = mlp { 2, o.width, o.width, 2, act = "gelu" }
local trainer = rille.Trainer {
  model = model, loss = nn.cross_entropy, optimizer = { "adamw", lr = o.lr }, seed = o.seed,
  batch = { global = 100 }, log = 100,
}
for _, batch in trainer:steps(rille.data.fixed { x, y, seed = o.seed }, o.steps) do
  trainer:step(batch)
end

local guesses = rille.no_grad(function() return model(x):argmax(-1) end)
print(("%d of %d points on the right spiral"):format(guesses:eq(y):sum():item(), y:numel()))
