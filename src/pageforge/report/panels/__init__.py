"""The kinds of charts: each drawn by Plotly on the page, and by Matplotlib as a picture."""
