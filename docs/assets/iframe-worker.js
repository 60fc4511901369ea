// Browsers refuse workers on file:// pages. There, the search worker runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.title = "Search"
      this.loaded = new Promise(resolve => {
        window.addEventListener("message", ({ source, data }) => {
          if (source !== frame.contentWindow) return
          if (data === "loaded") resolve(frame.contentWindow)
          else this.dispatchEvent(new MessageEvent("message", { data }))
        })
      })
      frame.srcdoc = `<script>
        var toPage = parent.postMessage.bind(parent)
        postMessage = data => toPage(data, "*")
        onload = () => postMessage("loaded")
      <\/script><script src="${new URL(url, location)}"><\/script>`
      document.head.parentNode.append(frame)
    }
    postMessage(data) {
      this.loaded.then(frame => frame.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
