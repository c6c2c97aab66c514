-- A pipeline schedule of one's own: 1f1b that runs ahead by `AHEAD` microbatches, which hides some
-- latency of the messages and keeps as many activations more.
--
--     rille schedule scripts/examples/schedule.lua -p 8 -m 32 --hop 0.1
local rille = require "rille"
local AHEAD = 2

return rille.schedule {
  name = "ahead",
  order = function(r, p, m) -- the actions of rank r of p, for m microbatches
    local list, w = {}, r < p - 1 and math.min(m, p - 1 - r + AHEAD) or 0
    for i = 0, w - 1 do list[#list + 1] = r .. "F" .. i end
    for i = w, m - 1 do
      list[#list + 1] = r .. "F" .. i
      list[#list + 1] = r .. "B" .. i - w
    end
    for i = m - w, m - 1 do list[#list + 1] = r .. "B" .. i end
    return list
  end,
  memory = function(r, p, m) return math.min(m, p - r + AHEAD) end, -- activations kept, at most
}
